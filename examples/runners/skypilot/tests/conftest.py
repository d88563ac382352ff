"""Fixtures of the project's own tests."""

from tests.conftest import aws, probe_stage, s3, url

# pytest finds fixtures by their names here.
__all__ = ["aws", "probe_stage", "s3", "url"]
