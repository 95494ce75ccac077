"""The native runner: a lean decoder for Llama, Mistral, Qwen2 and Qwen3 over the paged pool."""
