"""Requests to servers, shared by the stages that ask one: httpx and the standard library only."""
