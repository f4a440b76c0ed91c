"""People drawn by code in three modalities, for re-identification: who they are, how they are painted, and the files."""
