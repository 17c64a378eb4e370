"""Models by name: `gpt:..`, `hf:..`, vision models and modules of the user."""
