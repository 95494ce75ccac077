"""What every service is made of: mailbox, supervisor, gRPC server, settings, logs."""
