"""Import and export of models in the Hugging Face format. Files are read as data, and their code is never run."""
