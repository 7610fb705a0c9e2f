# What the containers of vLLM load, in /plugin: our packages, and llguidance in the version of the nodes, under a name of its own.
# Nothing of it is installed. Build from the repository's root:
#   docker build -f k8s/images/vllm-plugin.Dockerfile -t ryzanstein/vllm-plugin:0.1.0 .
FROM python:3.11-slim AS packages
COPY constraints.txt .
RUN pip install --no-cache-dir --no-deps --constraint constraints.txt --target /packages llguidance

FROM busybox:1.37-musl
COPY --chmod=0755 services/ryzanstein /plugin/ryzanstein
COPY --chmod=0755 shared/ryzanstein /plugin/ryzanstein
COPY --chmod=0755 clients/python/ryzanstein /plugin/ryzanstein
COPY --from=packages --chmod=0755 /packages/llguidance /plugin/ryzanstein_llguidance
USER 65532:65532
CMD ["cp", "-r", "/plugin/.", "/target"]
