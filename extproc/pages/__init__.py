"""The admin pages: HTTP, the JSON of what is shown, the live feed and the files of the page itself."""
