#!/bin/sh
# Makes .venv with fastgnl (editable), the development tools, transformers, DeepSpeed and, where its headers are, FFCV.
# Needs Python 3.10 or newer. As root on Debian it installs FFCV's headers itself.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
headers="libopencv-dev libturbojpeg0-dev pkg-config"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || {
    echo "set-up: $python is $("$python" --version 2>&1 || echo missing), wanted Python 3.10 or newer (make PYTHON=/path/to/python3)" >&2
    exit 1
}

have_headers() { command -v pkg-config >/dev/null && pkg-config --exists opencv4 libturbojpeg; }
is_root_on_debian() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }
apt_install() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq update >&2 &&
        DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null
}

echo "set-up: making .venv (once; a minute or two)"
rm -f .venv/ready
if [ ! -x .venv/bin/pip ]; then
    rm -rf .venv
    "$python" -m venv .venv 2>/dev/null || {
        is_root_on_debian && apt_install python3-venv python3-dev && "$python" -m venv .venv
    } || {
        echo "set-up: $python cannot make an environment, wanted its venv module (Debian: apt-get install python3-venv)" >&2
        exit 1
    }
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
pip install -c constraints.txt -e ".[dev]"
pip install -c constraints.txt -e ".[nlp]" || echo "set-up: transformers did not install, going on without text encoders" >&2
pip install -c constraints.txt -e ".[bench]" || echo "set-up: cleanlab did not install, going on without it in bench/accuracy.py" >&2
pip install -c constraints.txt -e ".[deepspeed]" || echo "set-up: DeepSpeed did not install, going on with DDP only" >&2

if ! have_headers && is_root_on_debian; then
    echo "set-up: installing FFCV's headers ($headers)"
    apt_install $headers || true
fi
if have_headers; then
    echo "set-up: building FFCV"
    pip install -c constraints.txt -e ".[ffcv]" || echo "set-up: FFCV did not build, going on with the built-in loader" >&2
else
    echo "set-up: FFCV's headers are missing, going on with the built-in loader; for FFCV run: sudo apt-get install $headers && make clean venv"
fi
touch .venv/ready
