"""Trained parts of methods: their files, the model they belong to, and sharing them on the Hub."""
