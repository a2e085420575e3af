"""Entry point of `python -m megatron_brorl`, which torchrun starts."""

if __name__ == "__main__":
    from megatron_brorl.cli.main import main

    main()
