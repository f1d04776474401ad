"""What every interface of the package stands on: the native module, arrays, memory, calls."""
