//! Which file of a crate imports from which, and where that goes round in a circle.
//!
//! A name counts as imported from the file that defines it, whatever re-exports it on the way. The files
//! below a file are its parts: that they import from it makes no circle. Tests are left out.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use syn::{
    Attribute, Item, UseTree, Visibility,
    visit::{self, Visit},
};

/// The path of a module in its crate; that of the root is empty.
type Module = Vec<String>;

/// What is known of a module, be it a file or a part of one.
#[derive(Default)]
struct Names {
    /// What it imports, as it is written, from the root of the crate on.
    imported: Vec<Module>,
    /// By what name it re-exports what.
    exported: BTreeMap<String, Module>,
}

#[derive(Default)]
struct Crate {
    files: BTreeSet<Module>,
    modules: BTreeMap<Module, Names>,
}

/// The imports that are part of a circle, a line each; none for a directory that is no crate's.
pub fn circles(source: &Path) -> Vec<String> {
    let mut all = Crate::default();
    read(source, source, &mut all.files, &mut Vec::new());
    let mut parsed = Vec::new();
    read(source, source, &mut BTreeSet::new(), &mut parsed);
    for (module, text) in &parsed {
        let file = syn::parse_file(text).expect("what the compiler has read");
        let mut reader = Reader { all: &mut all, module: module.clone() };
        reader.items(&file.items);
    }
    let mut edges: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
    for (module, names) in &all.modules {
        let from = all.file_of(module);
        for path in &names.imported {
            let to = all.file_of(&all.defined_in(path, 0));
            // The files below one are its parts, and may use what it defines.
            if !from.starts_with(&to) {
                edges.entry(from.clone()).or_default().insert(to);
            }
        }
    }
    let krate = source.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
    let line = |from: &Module, to: &Module| {
        format!("{krate}: {} imports from {}", from.join("::"), to.join("::"))
    };
    let all = edges.iter().flat_map(|(from, to)| to.iter().map(move |to| (from, to)));
    all.filter(|(from, to)| reaches(&edges, to, from)).map(|(from, to)| line(from, to)).collect()
}

/// Whether imports lead from one module to another.
fn reaches(edges: &BTreeMap<Module, BTreeSet<Module>>, from: &Module, to: &Module) -> bool {
    let (mut seen, mut open) = (BTreeSet::from([from]), vec![from]);
    while let Some(at) = open.pop() {
        if at == to {
            return true;
        }
        open.extend(edges.get(at).into_iter().flatten().filter(|next| seen.insert(next)));
    }
    false
}

/// All modules below a directory that have a file, with the texts of those files.
fn read(dir: &Path, root: &Path, files: &mut BTreeSet<Module>, texts: &mut Vec<(Module, String)>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            read(&path, root, files, texts);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let relative = path.strip_prefix(root).expect("below the root").with_extension("");
            let mut module: Module =
                relative.iter().map(|part| part.to_string_lossy().into_owned()).collect();
            if module.last().is_some_and(|name| ["mod", "lib", "main"].contains(&name.as_str())) {
                module.pop();
            }
            if !module.last().is_some_and(|name| name == "tests" || name.ends_with("_tests")) {
                files.insert(module.clone());
                texts.push((module, fs::read_to_string(&path).expect("a source")));
            }
        }
    }
}

impl Crate {
    fn file_of(&self, module: &[String]) -> Module {
        let mut module = module.to_vec();
        while !module.is_empty() && !self.files.contains(&module) {
            module.pop();
        }
        module
    }

    fn defined_in(&self, path: &[String], depth: usize) -> Module {
        let mut module = Module::new();
        for (at, name) in path.iter().enumerate() {
            let mut next = module.clone();
            next.push(name.clone());
            if self.modules.contains_key(&next) || self.files.contains(&next) {
                module = next;
                continue;
            }
            let exported = self.modules.get(&module).and_then(|names| names.exported.get(name));
            return match exported {
                Some(target) if depth < 8 => {
                    let rest = path[at + 1..].iter();
                    let path: Module = target.iter().chain(rest).cloned().collect();
                    self.defined_in(&path, depth + 1)
                }
                _ => module,
            };
        }
        module
    }
}

struct Reader<'a> {
    all: &'a mut Crate,
    module: Module,
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.meta.require_list().is_ok_and(|list| list.tokens.to_string() == "test")
    })
}

impl Reader<'_> {
    fn items(&mut self, items: &[Item]) {
        self.all.modules.entry(self.module.clone()).or_default();
        for item in items {
            self.visit_item(item);
        }
    }

    fn names(&mut self) -> &mut Names {
        self.all.modules.entry(self.module.clone()).or_default()
    }

    /// A path from the root of the crate on; `None` if it leads out of the crate.
    fn absolute(&self, path: &[String]) -> Option<Module> {
        let mut from = self.module.clone();
        let mut path = path;
        match path.first()?.as_str() {
            "crate" => from.clear(),
            "self" => {}
            "super" => {
                while path.get(1).is_some_and(|name| name == "super") {
                    from.pop();
                    path = &path[1..];
                }
                from.pop();
            }
            name => {
                // A module beside the import, or another crate.
                from.push(name.to_owned());
                return self.all.files.contains(&from).then(|| {
                    from.extend_from_slice(&path[1..]);
                    from
                });
            }
        }
        from.extend_from_slice(&path[1..]);
        Some(from)
    }

    fn import(&mut self, tree: &UseTree, before: &mut Module, is_export: bool) {
        match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.import(&path.tree, before, is_export);
                before.pop();
            }
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.import(tree, before, is_export);
                }
            }
            UseTree::Glob(_) => self.imported(before, None, is_export),
            UseTree::Name(name) => self.name(&name.ident, &name.ident, before, is_export),
            UseTree::Rename(name) => self.name(&name.ident, &name.rename, before, is_export),
        }
    }

    fn name(
        &mut self,
        ident: &syn::Ident,
        rename: &syn::Ident,
        before: &mut Module,
        is_export: bool,
    ) {
        if ident == "self" {
            return self.imported(before, None, is_export);
        }
        before.push(ident.to_string());
        self.imported(before, Some(rename.to_string()), is_export);
        before.pop();
    }

    fn imported(&mut self, path: &[String], name: Option<String>, is_export: bool) {
        let Some(path) = self.absolute(path) else { return };
        match name {
            Some(name) if is_export => drop(self.names().exported.insert(name, path)),
            _ => self.names().imported.push(path),
        }
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        match item {
            Item::Use(item) if !is_test(&item.attrs) => {
                let is_export = !matches!(item.vis, Visibility::Inherited);
                self.import(&item.tree, &mut Module::new(), is_export);
            }
            Item::Mod(item) => {
                let Some((_, items)) = item.content.as_ref().filter(|_| !is_test(&item.attrs))
                else {
                    return;
                };
                self.module.push(item.ident.to_string());
                self.items(items);
                self.module.pop();
            }
            Item::Use(_) => {}
            item => visit::visit_item(self, item),
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Module = path.segments.iter().map(|part| part.ident.to_string()).collect();
        if names.len() > 1 && ["crate", "super", "self"].contains(&names[0].as_str()) {
            self.imported(&names, None, false);
        }
        visit::visit_path(self, path);
    }
}
