"""Pictures of what plans do to images: `tokensieve show`, `Handle.picture`, and the examples of a report."""
