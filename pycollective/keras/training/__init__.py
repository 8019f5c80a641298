"""Training of models: `compile`, `fit`, `evaluate`, `predict`, under any strategy."""
