from benchmarks.gateway.run import main

main()
