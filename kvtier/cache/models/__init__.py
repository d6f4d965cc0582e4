"""Models as layers: the spec of each, from a description in our words or a Hugging Face `config.json`."""
