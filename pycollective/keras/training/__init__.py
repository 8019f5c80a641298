"""How models are trained: `compile`, `fit`, `evaluate`, `predict`, under any strategy."""
