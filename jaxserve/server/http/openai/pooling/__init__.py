"""Routes for vectors of texts and scores of pairs."""
