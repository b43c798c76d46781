from posenc.runtimes.conformance import frequencies as frequencies
