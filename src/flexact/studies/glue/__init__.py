"""The text study: pretrained encoders on GLUE, through the Hugging Face Trainer."""
