"""What a running server learns from its own steps: confidence, step times, counts. It knows nothing else of ours."""
