"""What bench_gateway runs beside the server under measurement: engines that cost next to nothing, and a client."""
