"""AccelGen: the size of a batch, the urgency of requests, and which others fill the batch."""
