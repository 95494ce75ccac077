"""The model that the benchmarks of decoding run, unless they are told another."""

TARGET = "smollm2-135m-instruct"
