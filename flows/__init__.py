"""Orchestration: Prefect flows over the stages. No torch, no vLLM."""
