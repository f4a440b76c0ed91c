"""`tokensieve tune`: which plan loses least on a model and a user's own images, without labels, at a given speed."""
