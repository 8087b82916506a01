"""raycheck inside Ray: callback, coordinator, agent, worker."""
