"""Generated protobuf and gRPC stubs. Never edited: `make proto` writes them."""
