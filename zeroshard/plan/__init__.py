"""What a configuration needs, known before it runs. Nothing in here communicates."""
