# docker build -t picker .
FROM python:3.13-slim AS build
WORKDIR /src
RUN python -m venv /opt/picker
# The locked dependencies first: they change less often than the code does.
COPY requirements.lock pyproject.toml ./
RUN python -m venv /opt/tools && /opt/tools/bin/pip install --quiet --no-cache-dir "uv>=0.9,<1"
# Only what running needs, at the locked versions.
RUN /opt/tools/bin/uv pip compile --quiet pyproject.toml --extra otel --constraint requirements.lock \
        --generate-hashes --output-file runtime.txt \
    && /opt/picker/bin/pip install --quiet --no-cache-dir --require-hashes --requirement runtime.txt
COPY setup.py README.md LICENSE ./
COPY protos protos
COPY picker picker
RUN /opt/tools/bin/uv build --quiet --wheel --out-dir /dist \
    && /opt/picker/bin/pip install --quiet --no-cache-dir --no-deps /dist/*.whl

FROM python:3.13-slim
LABEL org.opencontainers.image.title="picker" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/picker /opt/picker
# A home for a user without one: the Kubernetes client asks for it.
ENV PATH=/opt/picker/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
# No name is needed for it, and none of its files is writable to it.
USER 65532:65532
# ext_proc, gRPC health, admin HTTP, Introspection
EXPOSE 9002 9003 9090 9091
ENTRYPOINT ["picker"]
CMD ["serve"]
