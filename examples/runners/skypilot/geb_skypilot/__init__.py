"""Runner of geb whose stages are managed jobs of SkyPilot."""
