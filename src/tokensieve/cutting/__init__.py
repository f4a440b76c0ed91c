"""Attaching a plan to a model: cuts in a vision tower and in a language decoder, with the state of each call kept apart."""
