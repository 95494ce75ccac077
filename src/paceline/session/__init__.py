"""The record of a session, in Redis or in memory."""
