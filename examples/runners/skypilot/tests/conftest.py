"""Fixtures of the project's own tests."""

from tests.conftest import aws, probe_stage, s3, url  # noqa: F401
