# The HTTP service on a CPU:
#   docker build -t vanilla-transformer .
#   docker run -p 5000:5000 -v $PWD/outputs/quickstart/model:/model:ro vanilla-transformer --model en-de=/model
FROM python:3.11-slim

WORKDIR /app
COPY pyproject.toml constraints.txt hatch_build.py README.md LICENSE ./
COPY hf_vanilla_transformer hf_vanilla_transformer
# The extra index has PyTorch without CUDA, a tenth of the size.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt '.[serve,export,sentences]' \
    && useradd --create-home service

USER service
EXPOSE 5000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:5000/health')"
ENTRYPOINT ["vanilla-transformer", "serve", "--host", "0.0.0.0"]
