"""Requests to servers, shared by the stages that ask one: httpx, pydantic and the contract only."""
