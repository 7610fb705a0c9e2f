# What the containers of vLLM load: our packages, unpacked, in /plugin. Nothing of it is installed. Build from the repository's root:
#   docker build -f k8s/images/vllm-plugin.Dockerfile -t ryzanstein/vllm-plugin:0.1.0 .
FROM busybox:1.37-musl
COPY --chmod=0755 services/ryzanstein /plugin/ryzanstein
COPY --chmod=0755 shared/ryzanstein /plugin/ryzanstein
USER 65532:65532
CMD ["cp", "-r", "/plugin/.", "/target"]
