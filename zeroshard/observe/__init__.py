"""What a run did: memory, volume, and who is missing when it stalls."""
