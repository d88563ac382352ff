"""Prepare stage: prompts from data sets and files, split into D_1…D_T and a held-out test set."""
