"""What is done with an answer: its usage, its model name, predicted hits against realised ones."""
