"""Text, tokens and checkpoints: a script a data set, the loader, the tokenizer, and llm.c's file formats."""
