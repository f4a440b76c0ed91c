"""Hostile inputs, seeded: `make attack` runs many tries of each class, `make test` a few.

A module of this package declares ATTACKS; `attack.find_attacks` collects them. A try is right if tokensieve gives the right
answer or refuses with a clear UserError, and nothing is lost.
"""
