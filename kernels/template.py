"""A version cut out of its kernel file, so that it stands alone: what a learner starts from."""

import ast
import builtins

from kernels.op import Version


def standing_alone(version: Version) -> str:
    """The source of a file that holds the version's launcher, under the op's name, its kernels, and what they use."""
    source = version.file.read_text()
    body = ast.parse(source).body
    defined = {name: node for node in body for name in _names_defined(node)}
    wanted, queue = set(), [version.launcher.__name__]
    while queue:
        name = queue.pop()
        if name in wanted or name not in defined:
            continue
        wanted.add(name)
        node = defined[name]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if name == version.launcher.__name__:
            node.decorator_list = []
        queue += [part.id for part in ast.walk(node) if isinstance(part, ast.Name) and not hasattr(builtins, part.id)]

    imports, rest = [], []
    for node in body:
        if not wanted & set(_names_defined(node)):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node.names = [alias for alias in node.names if (alias.asname or alias.name) in wanted]
            imports.append(ast.unparse(node))
        else:
            rest.append(_text(node, source))
    code = "\n".join(imports) + "\n\n\n" + "\n\n\n".join(rest)
    code = code.replace(version.launcher.__name__, version.op.name)
    layer = version.op.layer
    return f'''"""Version {version.number} of {version.op.name}: {version.description}. Make it faster, then run

    python kernels/{layer}/run.py --pass {version.op.name} --file THIS_FILE
"""

{code}
'''


def _names_defined(node) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    return []


def _text(node, source: str) -> str:
    """The node as it stands in the file, comments and all, its decorators too."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])
