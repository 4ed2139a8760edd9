//! Scheme `auto` for the limits of a spec file or a command line: who is inside whom, what was given, and
//! what the host has chosen before.

use std::collections::{BTreeMap, BTreeSet};

use tidegate_core::{
    Scheme, Scope,
    choice::{self, Kernel, Request},
    class::MAX_DEPTH,
};
use tidegate_sys::limit::LimitOptions;

use crate::{
    plan::Present,
    settings::{Patch, SchemeSetting, SettingsError, fields::FIELDS, inside_another, who},
};

/// Which limits are inside which, by name.
#[derive(Debug, Default)]
pub struct Trees {
    /// Whether it is on a device, and its parent.
    limits: BTreeMap<String, (bool, Option<String>)>,
    parents: BTreeSet<String>,
}

impl Trees {
    /// Those of a host.
    pub fn of(present: &[Present]) -> Trees {
        let mut trees = Trees::default();
        for limit in present {
            trees.add(&limit.name, limit.scope.is_device(), limit.parent.as_deref());
        }
        trees
    }

    /// Adds a limit, or replaces the one of its name.
    pub fn add(&mut self, name: &str, on_device: bool, parent: Option<&str>) {
        self.limits.insert(name.to_owned(), (on_device, parent.map(str::to_owned)));
        self.parents.extend(parent.map(str::to_owned));
    }

    /// Whether others are inside a limit.
    pub fn is_parent(&self, name: &str) -> bool {
        self.parents.contains(name)
    }

    /// Whether the limit at the root above a child of `parent` is on a device.
    fn is_in_device(&self, parent: Option<&str>) -> bool {
        let (mut at, mut on_device) = (parent, false);
        for _ in 0..MAX_DEPTH {
            let Some((device, above)) = at.and_then(|name| self.limits.get(name)) else { break };
            (at, on_device) = (above.as_deref(), *device);
        }
        on_device
    }
}

/// A limit as it was written.
#[derive(Debug, Clone, Copy)]
pub struct Written<'a> {
    /// Its name; empty if it has none.
    pub name: &'a str,
    pub scope: &'a Scope,
    /// The name of its parent.
    pub parent: Option<&'a str>,
    /// Its settings.
    pub patch: &'a Patch,
}

impl Written<'_> {
    /// Whether its scheme is chosen for it.
    pub fn is_auto(&self) -> bool {
        !matches!(self.patch.scheme, Some(SchemeSetting::Named(_)))
    }

    /// What a new limit does. A scheme that was chosen for it before is kept while it has what is asked.
    ///
    /// # Errors
    /// [`SettingsError`] names the field.
    pub fn options(
        &self,
        trees: &Trees,
        kernel: Kernel,
        is: Option<&LimitOptions>,
    ) -> Result<LimitOptions, SettingsError> {
        let base = if self.parent.is_some() { inside_another() } else { LimitOptions::default() };
        self.options_on(base, trees, kernel, is)
    }

    /// The same of a limit that was `base`.
    ///
    /// # Errors
    /// [`SettingsError`] names the field.
    pub fn options_on(
        &self,
        base: LimitOptions,
        trees: &Trees,
        kernel: Kernel,
        is: Option<&LimitOptions>,
    ) -> Result<LimitOptions, SettingsError> {
        let with = |base: &LimitOptions| self.patch.on(base, self.scope);
        if !self.is_auto() {
            return with(&base);
        }
        let given = FIELDS.iter().filter(|field| field.is_asked(self.patch));
        let mut given: Vec<_> = given.map(|field| field.key.name).collect();
        // Who is limited does not change with the scheme.
        let (exempt, matched) = (self.patch.exempt, self.patch.matched);
        let base_now = LimitOptions {
            exempt: exempt.unwrap_or(base.exempt),
            matched: matched.unwrap_or(base.matched),
            ..base
        };
        given.extend(who(&base_now));
        let request = Request {
            scope: self.scope,
            has_parent: self.parent.is_some(),
            in_device: trees.is_in_device(self.parent),
            is_parent: trees.parents.contains(self.name),
            fields: &given,
        };
        let kept = is.and_then(|is| Some((is.scheme, is.chosen?)));
        if let Some((scheme, chosen)) = kept
            && choice::keeps(scheme, &request)
            && let Ok(options) = with(&LimitOptions { scheme, chosen: Some(chosen), ..base })
        {
            return Ok(options);
        }
        let choice = choice::choose(&request, kernel)
            .map_err(|e| SettingsError { field: "scheme", problem: e.into() })?;
        with(&LimitOptions { scheme: choice.scheme, chosen: Some(choice.why), ..base })
    }

    /// The scheme that it names.
    pub fn is_named(&self, scheme: Scheme) -> bool {
        self.patch.scheme == Some(SchemeSetting::Named(scheme))
    }
}
