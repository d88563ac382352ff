"""The program around a stage: its context, supervisor, fork server and checks of its place."""
