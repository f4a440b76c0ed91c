"""`tokensieve demo`: one page in a browser on which plans are tried on images. Nothing of it leaves this machine."""
