"""Writing files so that a crash or a full disk never leaves half of one in the place of a whole one."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hasten.base.errors import InputError

_BLOCK_BYTES = 1 << 20
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.ENOENT: "its folder does not exist",
    errno.ENOTDIR: "its folder is a file",
    errno.EISDIR: "it is a folder",
    errno.ENAMETOOLONG: "the name is too long",
}


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a temporary file next to `path` for writing; on a clean exit it is synced and replaces `path`.

    On any error the temporary file is removed and what was at `path` is untouched.

    Raises:
        InputError: the file cannot be written (full disk, no permission, no such folder); says which and why.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        # mkstemp makes files that only the owner can read; a plain open() honours the umask.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno not in _REASONS:
            raise
        kept = "; the file that was there is unchanged" if path.is_file() else ""
        raise InputError(f"cannot write {path}: {_REASONS[error.errno]}{_free(path, error)}{kept}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_atomically(path: str | Path, data: bytes | str) -> None:
    """Replaces `path` by `data` (text as UTF-8): all of it, durable, or the old file as it was.

    Raises InputError as `atomic_file` does.
    """
    with atomic_file(path) as handle:
        handle.write(data.encode() if isinstance(data, str) else data)


def make_folder(folder: str | Path, what: str) -> Path:
    """Makes a folder, and those above it, unless it exists, and tries whether files can be made in it.

    Raises:
        InputError: it cannot be made or written to; begins with `what` and says why.
    """
    folder = Path(folder)
    try:
        taken = next((path for path in (folder, *folder.parents) if path.exists()), None)
        if taken is not None and not taken.is_dir():
            raise InputError(f"{what}: {taken} is a file, not a folder")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        # A missing folder that cannot be made although the one above exists: /proc and its like.
        refused = error.errno == errno.ENOENT
        reason = "no files can be made there" if refused else _REASONS.get(error.errno or 0, error.strerror)
        raise InputError(f"{what}: {reason}") from error
    return folder


@contextmanager
def locked(folder: str | Path, holder: str) -> Iterator[None]:
    """Holds `folder` for one process while the block runs, by a lock on the folder itself.

    The system frees the lock when the process ends, however it ends. Where there are no such locks (Windows,
    some network file systems) the block runs without one.

    Raises:
        InputError: another process holds it; `holder` is what the message calls that process.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InputError(f"cannot open folder {folder}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{folder} is in use by {holder}; wait for it, or choose another folder"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: str | Path) -> None:
    """Makes renames and new names in `folder` durable. Does nothing on Windows."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: str | Path) -> str:
    """The SHA-256 of a file's content as 64 hexadecimal digits, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _umask() -> int:
    # The mask can only be read by setting it; Linux also shows it here without that race between threads.
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    except OSError:
        pass
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _free(path: Path, error: OSError) -> str:
    if error.errno != errno.ENOSPC:
        return ""
    return f" ({shutil.disk_usage(path.parent).free / 1e6:.1f} MB free in {path.parent})"
