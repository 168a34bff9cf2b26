"""A Flower app that fine-tunes a language model of transformers by peft's adapters of low rank (LoRA)."""
