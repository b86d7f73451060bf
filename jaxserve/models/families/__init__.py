"""Model families: the embedding, one layer and the final part of each."""
