# Trainer and engine in one image, based on NGC's TensorRT-LLM release, which has torch, Transformer Engine and apex.
# This image has not been built yet (docs/cluster.md).
FROM nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc29

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/megatron-brorl

# Keep the versions of the base image, because TensorRT-LLM requires exactly those. Ray starts the workers of TensorRT-LLM
# and is not part of the base image.
COPY pyproject.toml setup.py README.md LICENSE ./
COPY csrc csrc
COPY megatron_brorl megatron_brorl
RUN pip freeze --exclude-editable | grep -iE '^(torch|numpy|transformers|triton|safetensors|setuptools|transformer[-_]engine[-_a-z0-9]*)==' \
      > /tmp/constraints.txt \
    && BRORL_CUDA=1 BRORL_NATIVE=0 CUDA_HOME=/usr/local/cuda MAX_JOBS=8 \
      pip install --no-build-isolation --constraint /tmp/constraints.txt . ray==2.53.0 \
    && rm /tmp/constraints.txt

# The examples write their runs next to themselves, so they are copied to the home directory of the user.
RUN useradd --create-home --uid 10001 brorl
USER 10001
WORKDIR /home/brorl
COPY examples examples
COPY tools tools
ENV PYTHONHASHSEED=0
HEALTHCHECK --interval=5m --timeout=2m --start-period=2m --retries=2 CMD ["brorl", "doctor"]
CMD ["brorl", "doctor"]
