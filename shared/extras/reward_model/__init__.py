"""Models that score answers: trained on pairs, asked for rewards."""
