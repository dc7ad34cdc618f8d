"""Tasks: items with documents, a question and what is right, and the scores of answers."""
