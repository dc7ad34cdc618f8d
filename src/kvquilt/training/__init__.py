"""Training writers: the model that reads stays frozen, what is stored for it is learned."""
