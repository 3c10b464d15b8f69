"""Makes .venv and installs the workbook into it: ``python3 install.py`` (``make lab`` and ``make test`` call it).

A line says each step. What goes wrong is said in one sentence, with what to do; pip's own words are in
``.venv/install.log``. Its syntax is old on purpose: an old Python shall say that it is too old.

    python3 install.py [--only-venv] [--system-site-packages]

With ``--system-site-packages`` the environment sees the packages of the Python that makes it, such as a torch for its
GPU, and takes from the requirements only what is missing; ``--only-venv`` stops ahead of them.
"""

import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(HERE, ".venv")
LOG = os.path.join(VENV, "install.log")
OLDEST = (3, 11)
LEAST_FREE_BYTES = 2 * 10**9  # the CPU build of torch with all else; with CUDA it is 8 GB

# What pip says, and what it means; the first that is found counts.
CAUSES = [
    (
        r"No space left on device|Errno 28|not enough space on the disk",
        "The disk is full: {free:.1f} GB are free in {folder}. Free about 2 GB (8 GB where torch brings CUDA along).",
    ),
    (
        r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|Connection (refused|reset)"
        r"|Temporary failure in name resolution|Network is unreachable|Max retries exceeded",
        "There is no network, or the package index does not answer. Try again when there is one, name a proxy or a "
        "mirror (PIP_PROXY, PIP_INDEX_URL), or see docs/pages/tests.md, 'Without a network there'.",
    ),
    (
        r"No matching distribution found for (?P<what>\S+)",
        "The package index has no {what} for this Python and this machine. Torch has wheels for 64-bit Linux, macOS on "
        "ARM and Windows: name another Python by `make PYTHON=python3.12 lab`.",
    ),
    (r"Permission denied|Errno 13", "{folder} may not be written to. Copy this folder to one that is yours."),
]


class CannotInstall(Exception):
    """What is missing, and what to do."""


def main(arguments):
    """The exit code: 0, or 1 after a sentence on stderr."""
    try:
        require_python(sys.version_info[:2])
        if not os.path.exists(os.path.join(VENV, "pyvenv.cfg")):
            make_venv("--system-site-packages" in arguments)
        if "--only-venv" not in arguments:
            install_packages()
    except CannotInstall as error:
        sys.stderr.write("%s\n" % error)
        return 1
    return 0


def require_python(version):
    """Refuse a Python that is too old, or that has no pip to put into an environment."""
    if tuple(version) < OLDEST:
        raise CannotInstall(
            "Python %d.%d is too old (%s): Python %d.%d or newer is needed. Install one, and name it: "
            "make PYTHON=python3.12 lab" % (tuple(version) + (sys.executable,) + OLDEST)
        )
    from importlib.util import find_spec

    for module in ("venv", "ensurepip"):
        if find_spec(module) is None:
            raise CannotInstall(
                "This Python has no pip to put into an environment (its module %s is missing: %s). On Debian and "
                "Ubuntu: apt-get install python3-venv" % (module, sys.executable)
            )


def make_venv(sees_system):
    """Make .venv; it sees the packages of this Python where that is asked for."""
    say("Making .venv with Python %d.%d.%d" % sys.version_info[:3])
    free = shutil.disk_usage(HERE).free
    if free < LEAST_FREE_BYTES and not sees_system:
        raise CannotInstall(CAUSES[0][1].format(free=free / 1e9, folder=HERE))
    options = ["--system-site-packages"] if sees_system else []
    try:
        run([sys.executable, "-m", "venv"] + options + [VENV])
    except CannotInstall:
        shutil.rmtree(VENV, ignore_errors=True)  # half an environment would be taken for a whole one
        raise
    if sees_system and sys.prefix != sys.base_prefix:
        show_the_makers_packages()


def show_the_makers_packages():
    """A venv sees its base interpreter's packages, also where its maker is in a venv itself: that one's are added."""
    import site

    lines = ["import site; site.addsitedir(%r)" % folder for folder in site.getsitepackages()]
    found = ask("import sysconfig; print(sysconfig.get_path('purelib'))")
    with open(os.path.join(found, "maker.pth"), "w") as file:
        file.write("\n".join(lines) + "\n")


def install_packages():
    """The requirements, at the versions of the lock where the environment is its own, and the notebooks' kernel."""
    with open(os.path.join(VENV, "pyvenv.cfg")) as file:
        sees_system = "include-system-site-packages = true" in file.read()
    wheelhouse = os.path.join(HERE, os.environ.get("WHEELHOUSE", "wheelhouse"))
    command = [python(), "-m", "pip", "install", "-r", "requirements.txt"]
    if not sees_system:
        # A venv that sees the system's packages keeps what requirements.txt admits, so the exact lock is not for it.
        command += ["-c", "requirements.lock"]
    elif os.path.isdir(wheelhouse) and any(name.endswith(".whl") for name in os.listdir(wheelhouse)):
        command += ["--no-index", "--find-links", wheelhouse]
    versions = "what is missing of requirements.txt" if sees_system else "the versions of requirements.lock"
    say("Installing %s: torch is the largest, and takes minutes where it brings CUDA along" % versions)
    run(command, tell=r"(Downloading \S+ \((\d{2,}(\.\d+)? M|[\d.]+ G)B\)|Installing collected packages)")
    say("Registering the notebooks' kernel")
    run([python(), "-m", "ipykernel", "install", "--sys-prefix"])
    say("Done.")


def run(command, tell=None):
    """Run a command; its output goes into the log, and what matches ``tell`` to the reader."""
    output = []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=HERE)
    for line in process.stdout:
        output.append(line.decode("utf-8", "replace"))
        told = re.search(tell, output[-1]) if tell else None
        if told:
            say("  " + told.group(0))
    keep("".join(output))
    if process.wait():
        raise CannotInstall(explain("".join(output), " ".join(command)))


def keep(output):
    """Append to the log; where there is no environment yet, or no room, there is none."""
    try:
        with open(LOG, "a") as log:
            log.write(output)
    except OSError:
        pass


def explain(output, command):
    """The sentence for what a command printed before it failed."""
    for pattern, sentence in CAUSES:
        found = re.search(pattern, output)
        if found:
            free = shutil.disk_usage(HERE).free / 1e9
            return sentence.format(free=free, folder=HERE, **found.groupdict())
    last = output.strip().splitlines()[-1:] or ["it printed nothing"]
    return "This command failed, and its last line is %r: %s (all of it: %s)" % (last[0], command, LOG)


def python():
    """The interpreter of .venv."""
    folder, name = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    return os.path.join(VENV, folder, name)


def ask(code):
    """What a line of Python prints in .venv."""
    return subprocess.check_output([python(), "-c", code]).decode().strip()


def say(line):
    """A line for the reader, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
