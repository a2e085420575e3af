"""python -m megatron_brorl: what torchrun starts."""

if __name__ == "__main__":
    from megatron_brorl.cli.main import main

    main()
